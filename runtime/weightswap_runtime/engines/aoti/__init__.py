"""The engine `aoti`: what AOTInductor compiled for a target."""
