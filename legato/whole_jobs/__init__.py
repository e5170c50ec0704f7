"""The step of a whole training job: tensor, pipeline, expert, context and data parallelism, predicted by formulas.

`step.predict` predicts a step. docs/whole_jobs.md has the formulas, their sources, and the errors for measured steps.
"""
