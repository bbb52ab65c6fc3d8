"""Outside providers as targets: a conversation into their words, and their answers into ours."""
