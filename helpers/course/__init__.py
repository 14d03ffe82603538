"""The course's own tools: a notebook's session, the runner, the builder with its checks, the report, the doctor."""
