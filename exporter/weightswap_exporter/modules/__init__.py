"""Live modules: tensors, skeletons, stand-ins, support of transformers and PEFT, and errors of the user's code."""
