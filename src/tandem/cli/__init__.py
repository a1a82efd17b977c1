"""The command `tandem`: one module per subcommand, imported when the subcommand is called."""
