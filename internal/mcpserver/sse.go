package mcpserver

import (
	"fmt"
	"net/http"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/devices"
)

// sseStreams are the sessions of the transport before Streamable HTTP: one GET that
// carries every response, and POSTs that name it.
type sseStreams struct {
	mu   sync.Mutex
	byID map[string]*sseStream
}

type sseStream struct {
	v         *requestInfo
	transport *mcp.SSEServerTransport
}

// serveSSE serves the transport of 2024-11-05, for the whole fleet. The SDK's handler
// neither binds a session to its caller nor counts it.
func (s *Server) serveSSE(w http.ResponseWriter, r *http.Request, v *requestInfo) {
	switch r.Method {
	case http.MethodGet:
		s.openSSE(w, r, v)
	case http.MethodPost:
		s.sseStreams.mu.Lock()
		stream := s.sseStreams.byID[r.URL.Query().Get("sessionid")]
		s.sseStreams.mu.Unlock()
		switch {
		case stream == nil:
			http.Error(w, "session not found", http.StatusNotFound)
		case !stream.v.caller.Is(v.caller):
			s.refuse(w, r, refuse(refusedOwner, devices.CodeForbidden, "this session was opened by another key"))
		default:
			s.postSSE(w, r, stream)
		}
	default:
		w.Header().Set("Allow", "GET, POST")
		http.Error(w, "Method Not Allowed", http.StatusMethodNotAllowed)
	}
}

// postSSE receives one message. For unknown methods, the SDK would respond outside the
// stream.
func (s *Server) postSSE(w http.ResponseWriter, r *http.Request, stream *sseStream) {
	body, err := readBody(r)
	if err != nil {
		s.refuse(w, r, refuse(refusedBody, devices.CodeBadRequest, "the request body is incomplete"))
		return
	}
	method, id := callOf(body)
	if id == nil || methods[method] {
		stream.transport.ServeHTTP(w, r)
		return
	}
	out := stream.transport.Response
	if _, err := fmt.Fprintf(out, "event: message\ndata: %s\n\n", s.methodNotFound(id, method)); err != nil {
		http.Error(w, "session not found", http.StatusNotFound) // its stream has ended
		return
	}
	_ = http.NewResponseController(out).Flush() // the next write fails if the client has disconnected
	w.WriteHeader(http.StatusAccepted)
}

func (s *Server) openSSE(w http.ResponseWriter, r *http.Request, v *requestInfo) {
	slot, denied := s.sessions.reserve(v)
	if denied != nil {
		s.refuse(w, r, denied)
		return
	}
	defer slot.release()
	id := s.newSessionID()
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache, no-transform")
	stream := &sseStream{v, &mcp.SSEServerTransport{Endpoint: PathSSE + "?sessionid=" + id, Response: w, MaxRequestBodyBytes: BodyLimit}}
	s.sseStreams.mu.Lock()
	s.sseStreams.byID[id] = stream
	s.sseStreams.mu.Unlock()
	defer func() {
		s.sseStreams.mu.Lock()
		delete(s.sseStreams.byID, id)
		s.sseStreams.mu.Unlock()
	}()
	v.request.stream.Store(true)
	session, err := s.fleet.server.Connect(r.Context(), stream.transport, nil)
	if err != nil { // the client has disconnected
		return
	}
	if !slot.bind(session, id, v) {
		_ = session.Close() // no request is in progress
		return
	}
	defer s.sessions.sessionEnded(id)
	if leave, denied := s.sessions.enterSession(id, v); denied == nil { // counts as in use until its stream ends
		defer leave()
	}
	over := make(chan struct{})
	go func() { // ends with the session
		defer close(over)
		_ = session.Wait() // the reason only concerns the client
	}()
	select {
	case <-r.Context().Done():
		v.session.Load().cancel()
		_ = session.Close()
		<-over
	case <-over:
	}
}
