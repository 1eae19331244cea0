"""The engine `aoti`: graphs that AOTInductor compiled for a target."""
