"""Where models come from: a package registry, a directory, the Hugging Face hub.

Each source brings files into a folder it is given and can be asked again after any kind of
death; none of them writes into the store.
"""
