package dispatch

import (
	"context"

	"fleetd/internal/audit"
	"fleetd/internal/devices"
)

// Router carries what is meant for a device one hop to the node that holds it.
// Every method fails with ErrNoHolder at once if no node does.
type Router interface {
	// Forward carries a tool call.
	Forward(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error)
	// ForwardRPC carries a raw MCP request.
	ForwardRPC(ctx context.Context, c devices.RPCCall) (devices.RPCResult, error)
	// ForwardMessage carries a message other than MCP.
	ForwardMessage(ctx context.Context, m devices.Message) error
	// Ask asks the holder, and returns what Service.Answer made there.
	Ask(ctx context.Context, id devices.ID, q devices.Question) ([]byte, error)
}

// Auditor takes the record of who did what. Record never blocks and never
// fails; what cannot be kept leaves a gap that shows.
type Auditor interface {
	Record(e audit.Entry)
}
