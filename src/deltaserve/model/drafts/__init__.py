"""Who guesses at the tokens that come next: a file for each algorithm of --speculative-algorithm."""
