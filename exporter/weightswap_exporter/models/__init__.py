"""The live nn.Module: its tensors, skeletons, stand-ins, transformers' special cases, and errors of the user's code."""
