"""The same question with one thing changed: what fits, what binds, what lies one change away, and other sizes."""
