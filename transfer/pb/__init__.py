"""Generated from proto/ by `make proto`; committed so that an install needs no compiler. Do not edit."""
