"""The integer linear programme of the choice, as a document. Plain data: it knows no solver."""
