"""JSON schemas and expressions of requests in a form that grammar libraries enforce safely."""
