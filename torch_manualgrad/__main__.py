"""``python -m torch_manualgrad``: the command line, as the console script ``manualgrad`` has it."""

from torch_manualgrad_cli import main

if __name__ == "__main__":
    main()
