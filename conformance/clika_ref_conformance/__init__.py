"""The conformance suite to come: drawn inputs, known failures and mutants that judge any operator, pass or target."""
