"""The error of this folder that users see: the file, the broken rule, and the fix."""

from megatron.config.problems import UserError


class DataError(UserError):
    """A data file, tokenizer or blend that cannot be used."""

    def __init__(self, subject: object, rule: str, fix: str):
        """`subject` is the file or key, `rule` the problem and what must hold, `fix` what the user can do."""
        self.subject, self.rule, self.fix = str(subject), rule, fix
        super().__init__(f"{subject}: {rule}\n    fix: {fix}")

    def __reduce__(self) -> "tuple[type[DataError], tuple[object, ...]]":
        return DataError, (self.subject, self.rule, self.fix)


class NotMadeYet(DataError):
    """A sample of a later step, which training makes."""
