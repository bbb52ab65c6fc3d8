"""What safety policies say, what they may not say, and how texts are searched by them.

The control plane refuses by `rulebook` what a gateway could not keep to; both must agree.
"""
