package mcpserver

import (
	"fmt"
	"net/http"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/devices"
)

// oldStreams are the sessions of the transport before Streamable HTTP: one GET
// that carries every answer, and POSTs that name it.
type oldStreams struct {
	mu   sync.Mutex
	byID map[string]*oldStream
}

type oldStream struct {
	v         *visit
	transport *mcp.SSEServerTransport
}

// serveSSE serves the transport of 2024-11-05, for the whole fleet. The SDK has
// a handler for it, which neither binds a session to its caller nor counts it.
func (s *Server) serveSSE(w http.ResponseWriter, r *http.Request, v *visit) {
	switch r.Method {
	case http.MethodGet:
		s.openSSE(w, r, v)
	case http.MethodPost:
		s.old.mu.Lock()
		stream := s.old.byID[r.URL.Query().Get("sessionid")]
		s.old.mu.Unlock()
		switch {
		case stream == nil:
			http.Error(w, "session not found", http.StatusNotFound)
		case stream.v.who.Key != v.who.Key:
			s.refuse(w, r, refuse(refusedOwner, devices.CodeForbidden, "this session was opened by another key"))
		default:
			s.postSSE(w, r, stream)
		}
	default:
		w.Header().Set("Allow", "GET, POST")
		http.Error(w, "Method Not Allowed", http.StatusMethodNotAllowed)
	}
}

// postSSE takes one message. The SDK would answer outside the stream where the method
// is not there.
func (s *Server) postSSE(w http.ResponseWriter, r *http.Request, stream *oldStream) {
	body, err := readBody(r)
	if err != nil {
		s.refuse(w, r, refuse(refusedBody, devices.CodeBadRequest, "the request's body broke off"))
		return
	}
	method, id := callOf(body)
	if id == nil || methods[method] {
		stream.transport.ServeHTTP(w, r)
		return
	}
	out := stream.transport.Response
	if _, err := fmt.Fprintf(out, "event: message\ndata: %s\n\n", s.notThere(id, method)); err != nil {
		http.Error(w, "session not found", http.StatusNotFound) // its stream is gone
		return
	}
	_ = http.NewResponseController(out).Flush() // the next write fails if the client is gone
	w.WriteHeader(http.StatusAccepted)
}

func (s *Server) openSSE(w http.ResponseWriter, r *http.Request, v *visit) {
	place, no := s.sessions.reserve(v)
	if no != nil {
		s.refuse(w, r, no)
		return
	}
	defer place.release()
	id := s.newSessionID()
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache, no-transform")
	stream := &oldStream{v, &mcp.SSEServerTransport{Endpoint: PathSSE + "?sessionid=" + id, Response: w, MaxRequestBodyBytes: BodyLimit}}
	s.old.mu.Lock()
	s.old.byID[id] = stream
	s.old.mu.Unlock()
	defer func() {
		s.old.mu.Lock()
		delete(s.old.byID, id)
		s.old.mu.Unlock()
	}()
	v.request.stream.Store(true)
	session, err := s.fleet.server.Connect(r.Context(), stream.transport, nil)
	if err != nil { // the client is gone
		return
	}
	if !place.bind(session, id, v) {
		_ = session.Close() // nothing was asked yet
		return
	}
	defer s.sessions.ended(id)
	if leave, no := s.sessions.enterSession(id, v); no == nil { // it has a stream as long as it lives
		defer leave()
	}
	over := make(chan struct{})
	go func() { // ends with the session
		defer close(over)
		_ = session.Wait() // why it ended is nobody's business but the client's
	}()
	select {
	case <-r.Context().Done():
		v.session.Load().cancel()
		_ = session.Close()
		<-over
	case <-over:
	}
}
