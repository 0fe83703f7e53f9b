"""Which layout is the fastest, and how close is it to the best?"""
