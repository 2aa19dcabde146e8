"""The commands of `lockstep`, a module each: `main(arguments) -> exit code`. None imports torch before it must."""
