"""The two residencies: one arena or two, with the staged sets and commits of each."""
