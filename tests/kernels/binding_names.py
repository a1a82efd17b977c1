"""Native functions that the cases of bindings leave out."""

# What takes no memory: numbers, or objects that were checked when they were made.
WITHOUT_MEMORY = {
    "AttentionEngine", "CpuFeatures", "DenseEngine", "DenseMatrix", "DriverLink", "ExpertEngine",
    "ExpertEngine.bind_workers", "ExpertEngine.multiply", "ExpertEngine.wake", "ExpertLayout",
    "ForesightTables", "ForesightTables.begin_step", "ForesightTables.scores",
    "ForesightTables.teach", "HeldExpert", "HeldExpert.address", "HeldExpert.has_come",
    "HeldExpert.keep", "HeldExpert.let_go", "HeldExpert.wait", "HostSlots.counts",
    "HostSlots.fail", "HostSlots.hold", "HostSlots.is_direct", "HostSlots.note_on_device",
    "HostSlots.pin", "HostSlots.read_buffered", "HostSlots.resident", "HostSlots.take_back", "HostSlots.try_hold",
    "HostSlots.use_share",
    "IndexLayer", "LoneTerms", "MailboxLayout", "Program",
    "Program.num_active", "Program.run", "ProjectionLayout", "RecurrentEngine", "RoutedExperts",
    "RuleStart", "SlotCounts",
    "StartedBatch.finish", "StepCoordinator", "StepCoordinator.abort_step",
    "StepCoordinator.begin_copies", "StepCoordinator.begin_step", "StepCoordinator.clear_entries",
    "StepCoordinator.close", "StepCoordinator.copy_error", "StepCoordinator.drain_copies",
    "StepCoordinator.finish_step", "StepCoordinator.records", "StepCoordinator.set_dense_seconds",
    "StepCoordinator.set_hook", "StepCoordinator.submit", "StepCoordinator.take_arrivals",
    "StepCoordinator.take_decided", "StepLostError", "StepPolicy", "StepPolicy.begin_step",
    "StepPolicy.copy_finished", "StepPolicy.decide", "StepPolicy.learn", "StepPolicy.link_free_at",
    "StepPolicy.load", "StepPolicy.resident", "StepSlowError", "SuccessorTable",
    "SuccessorTable.followed", "SuccessorTable.learn", "SuccessorTable.note",
    "SuccessorTable.resize",
    "SuccessorTable.values", "TokenSampler", "TwinStream.join", "TwinStream.set_dense_seconds",
    "TwinStream.set_patience", "TwinStream.times", "available_isas", "block_bytes", "block_cols",
    "decide_lone_layer", "detect_cpu_features", "join_crc32c", "slot_bytes",
}  # fmt: skip
