package mcpserver

import (
	"context"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/cleantext"
)

type explainArgs struct {
	Device string `json:"device"`
	Call   string `json:"call"`
}

func (s *Server) explainDevice(ctx context.Context, _ *mcp.CallToolRequest, args explainArgs) (*mcp.CallToolResult, error) {
	by := requestInfoOf(ctx).by()
	if (args.Device == "") == (args.Call == "") {
		return nil, badArguments("give device or call")
	}
	var e api.Why
	if args.Call != "" {
		if err := s.opt.Service.Permit(ctx, by, access.ScopeEvents, ""); err != nil {
			return nil, err
		}
		var err error
		if e, err = s.opt.Explainer.ExplainCall(ctx, by, args.Call); err != nil {
			return nil, err
		}
	} else {
		id, err := s.deviceOf(ctx, by, args.Device)
		if err != nil {
			return nil, err
		}
		if err := s.opt.Service.Permit(ctx, by, access.ScopeEvents, id); err != nil {
			return nil, err
		}
		if e, err = s.opt.Explainer.Device(ctx, by, id); err != nil {
			return nil, err
		}
	}
	e.Sentence = cleantext.Lines(e.Sentence) // it quotes the device
	for i := range e.Evidence {
		e.Evidence[i].Text = cleantext.Lines(e.Evidence[i].Text)
	}
	return structured(e), nil
}
