"""The DeepSeek-V4.1 backbone and draft module, and V4, written once against the operator table."""
