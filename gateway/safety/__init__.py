"""A tenant's safety policy at work: on what comes in, and on what goes out as it is made."""
