package mcpclient

import "strings"

// Refusal sorts the errors a device answers.
type Refusal string

// Refusals. Anything else is the tool's own failure.
const (
	RefusalOther     Refusal = ""
	RefusalTool      Refusal = "unknown_tool"
	RefusalArguments Refusal = "invalid_arguments"
	RefusalMethod    Refusal = "unknown_method"
)

// dialect is the firmware's own error texts (mcp_server.cc:410-433, 508-560;
// mcp_server.h:110-121): the one place where error text is matched.
var dialect = []struct {
	prefix  string
	refusal Refusal
}{
	{"Unknown tool: ", RefusalTool},
	{"Missing valid argument: ", RefusalArguments},
	{"Value is below minimum allowed", RefusalArguments},
	{"Value exceeds maximum allowed", RefusalArguments},
	{"Invalid arguments", RefusalArguments},
	{"Missing params", RefusalArguments},
	{"Missing name", RefusalArguments},
	{"Method not implemented: ", RefusalMethod},
}

// Refusal returns the reason of the error: by its text for the firmware,
// which sends no code, by the JSON-RPC code for others.
func (e *RPCError) Refusal() Refusal {
	for _, d := range dialect {
		if strings.HasPrefix(e.Message, d.prefix) {
			return d.refusal
		}
	}
	switch e.Code {
	case -32601:
		return RefusalMethod
	case -32602:
		return RefusalArguments
	}
	return RefusalOther
}
