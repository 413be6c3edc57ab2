package audit

// Outcomes beside the codes of refusals and failures.
const (
	OutcomeOK        = "ok"
	OutcomeToolError = "tool_error"
)
