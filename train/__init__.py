"""Makes the embedded model; no part of the installed package. See README.md."""
