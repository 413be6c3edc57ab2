package mcpserver

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/tasks"
)

// common handles every request of both servers first. It binds a new session to its
// caller, and refuses requests whose key has ended.
func (s *Server) common(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (result mcp.Result, err error) {
		// The SDK does not recover panics; one would end the sessions of all devices.
		defer tasks.Contain(s.log, func() {
			result, err = nil, &jsonrpc.Error{Code: jsonrpc.CodeInternalError, Message: "internal error; see the log of the node"}
		})
		s.stats.request(method)
		v := requestInfoOf(ctx)
		if err := s.opt.Service.Keys().Valid(v.caller, clock.Now()); err != nil {
			return nil, err
		}
		session, ok := req.GetSession().(*mcp.ServerSession)
		if !ok {
			return next(ctx, method, req)
		}
		var slot *connlimit.Slot
		switch method {
		case "initialize":
			if _, err := s.begin(ctx, v, 1, false); err != nil {
				return nil, err
			}
			if v.slot != nil && !v.slot.bind(session, session.ID(), v) {
				return nil, errors.New("the session cannot be opened: this node is stopping")
			}
		case "tools/call", "prompts/get", "resources/read", "completion/complete":
			done, ok := s.sessions.call(v)
			if !ok {
				s.stats.Refused.Add(refusedCalls, 1)
				return nil, invalid("this key has too many calls in progress")
			}
			defer done()
			if units := workOf(req); units > 0 { // calls of devices wait for these
				if slot, err = s.begin(ctx, v, units, true); err != nil {
					return nil, err
				}
				defer slot.Leave()
			}
			var cancel context.CancelFunc
			ctx, cancel = context.WithCancel(ctx)
			defer cancel()
			if x := v.session.Load(); x != nil { // the SDK does not cancel the calls of a session that ends
				defer context.AfterFunc(x.ctx, cancel)()
			}
		case "subscriptions/listen":
			v.request.stream.Store(true)
			defer s.subscriptions.drop(session)
			defer s.toolLists.listen(ctx, session, v)()
		default:
			if !strings.HasPrefix(method, "notifications/") {
				if slot, err = s.begin(ctx, v, 1, method == "resources/list"); err != nil { // which reads the fleet
					return nil, err
				}
				defer slot.Leave()
			}
		}
		return next(ctx, method, req)
	}
}

// begin waits until the caller may have so many units of work done, and if it is to compute for long, for a slot in which it does.
func (s *Server) begin(ctx context.Context, v *requestInfo, units int64, computes bool) (slot *connlimit.Slot, err error) {
	err = s.opt.Work.BeginUnits(ctx, v.caller.Key, units)
	if err == nil && computes {
		slot, err = s.opt.Work.Compute(ctx, v.caller.Key)
	}
	if err != nil {
		s.stats.Refused.Add(refusedRate, 1)
		return nil, invalid(err.Error())
	}
	return slot, nil
}

// cursor seals the place at which a page of a list ended; empty: the list is at its end.
func (s *Server) cursor(list, place string) string {
	if place == "" {
		return ""
	}
	return s.opt.Mint.Cursor(list, place, clock.Now())
}

// place opens the cursor of a list; an empty one is its beginning.
func (s *Server) place(list, cursor string) (string, error) {
	if cursor == "" {
		return "", nil
	}
	place, err := s.opt.Mint.Place(list, cursor, clock.Now())
	if err != nil {
		return "", badCursor
	}
	return place, nil
}

// badCursor is the error for an unknown cursor.
var badCursor = &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: "unknown cursor, or the list has changed; start again without a cursor"}

func invalid(detail string) error {
	return &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: detail}
}

// searchWork is the cost of a tool that the node answers from its own data, in units of
// connlimit.Work, because it searches the fleet.
const searchWork = 10

// workOf returns the cost of a call. Calls of devices have limits of their own.
func workOf(req mcp.Request) int64 {
	call, ok := req.GetParams().(*mcp.CallToolParamsRaw)
	switch {
	case !ok:
		return 1
	case call.Name == "call_device_tool", call.Name == "call_many", !isFleetTool(call.Name):
		return 0
	}
	return searchWork
}

func isFleetTool(name string) bool {
	return slices.ContainsFunc(fleetTools, func(t mcp.Tool) bool { return t.Name == name })
}
