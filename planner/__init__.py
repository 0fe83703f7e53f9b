"""Which layout? Reads models and clusters, searches the legal layouts, proves and explains the choice."""
