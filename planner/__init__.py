"""The memory plan of a rank's device, made before any memory is allocated, without torch.

`model_shape` reads sizes from a model's configuration, `model_directory` reads the files, `plan` makes the plan.
"""
