"""The memory plan: what a rank's device will hold, counted before a byte of it is allocated.

`model_shape` reads sizes off a model's configuration, `model_directory` reads the files, `plan` counts. None of them needs torch.
"""
