"""The command `tandem`: one module per subcommand, loaded when it is called."""
