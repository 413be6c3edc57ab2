package mcpserver

import (
	"context"
	"errors"
	"fleetd/internal/tasks"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// common stands before every request of both servers: it makes a session the
// caller's at its first request, and lets nobody go on whose key has ended.
func (s *Server) common(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (result mcp.Result, err error) {
		// The SDK contains no panic, and it would end the sessions of all devices.
		defer tasks.Contain(s.log, func() {
			result, err = nil, &jsonrpc.Error{Code: jsonrpc.CodeInternalError, Message: "a fault of the node; its log says more"}
		})
		s.stats.request(method)
		v := visitOf(ctx)
		if err := s.opt.Service.Keys().Valid(v.who, time.Now()); err != nil {
			return nil, err
		}
		session, ok := req.GetSession().(*mcp.ServerSession)
		if !ok {
			return next(ctx, method, req)
		}
		switch method {
		case "initialize":
			if v.place != nil && !v.place.bind(session, session.ID(), v) {
				return nil, errors.New("the session cannot be opened any more")
			}
		case "tools/call", "prompts/get", "resources/read", "completion/complete":
			done, ok := s.sessions.call(v)
			if !ok {
				s.stats.Refused.Add(refusedCalls, 1)
				return nil, invalid("this key has too many calls in progress")
			}
			defer done()
			var cancel context.CancelFunc
			ctx, cancel = context.WithCancel(ctx)
			defer cancel()
			if x := v.session.Load(); x != nil { // the SDK cancels no call of a session that ends
				defer context.AfterFunc(x.ctx, cancel)()
			}
		case "subscriptions/listen":
			v.request.stream.Store(true)
			defer s.follows.drop(session)
			defer s.lists.listen(ctx, session, v)()
		}
		return next(ctx, method, req)
	}
}

// badCursor is the protocol's answer to a cursor that is none of ours.
var badCursor = &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: "the cursor is none of ours, or the list has changed since; begin again without one"}

func invalid(detail string) error {
	return &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: detail}
}
