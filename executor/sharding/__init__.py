"""One parallelism a file. Order of application on a stage: tensor, recompute, data; then the pipeline runs it."""
