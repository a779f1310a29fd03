"""The earlier place of `trainer_cli.assert_resume_is_exact`, which tests of projects made before name."""

from trainer_cli import assert_resume_is_exact as assert_resume_is_exact
