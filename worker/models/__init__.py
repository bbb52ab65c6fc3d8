"""Model families, each as one forward pass over the packed rows of a step."""
