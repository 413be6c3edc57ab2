package mcpserver

import (
	"bytes"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"

	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// methods are those that a server has in the revisions with sessions.
var methods = map[string]bool{"initialize": true, "ping": true, "server/discover": true, "tools/list": true, "tools/call": true, "resources/list": true,
	"resources/templates/list": true, "resources/read": true, "resources/subscribe": true, "resources/unsubscribe": true, "prompts/list": true,
	"prompts/get": true, "completion/complete": true, "logging/setLevel": true}

// serveStateful serves the revisions with sessions: one that exists must be
// the caller's and of this path, and for a new one there must be room.
func (s *Server) serveStateful(w http.ResponseWriter, r *http.Request, v *visit) {
	h := s.endpointOf(v).stateful
	id := r.Header.Get("Mcp-Session-Id")
	if r.Method == http.MethodPost {
		answered, err := s.answerPost(w, r, id)
		if err != nil {
			s.refuse(w, r, refuse(refusedBody, devices.CodeBadRequest, "the request's body broke off"))
			return
		}
		if answered {
			return
		}
	}
	if id != "" || r.Method != http.MethodPost {
		leave, no := s.sessions.enterSession(id, v)
		if no != nil {
			s.refuse(w, r, no)
			return
		}
		defer leave()
		if r.Method == http.MethodGet {
			v.request.stream.Store(true)
			stream, _, _ := strings.Cut(r.Header.Get("Last-Event-ID"), "_")
			s.sessions.takeOver(r.Context(), id, stream, v.request)
		}
		h.ServeHTTP(w, r)
		return
	}
	place, no := s.sessions.reserve(v)
	if no != nil {
		s.refuse(w, r, no)
		return
	}
	defer place.release()
	v.place = place
	h.ServeHTTP(w, r)
}

// answerPost answers what the SDK would answer outside the protocol: a method that
// is not there, and a request that needs a session and names none.
func (s *Server) answerPost(w http.ResponseWriter, r *http.Request, session string) (answered bool, err error) {
	body, err := readBody(r)
	if err != nil {
		return false, err
	}
	method, call := callOf(body)
	switch {
	case tooMany(body):
		writeError(w, http.StatusBadRequest, errorAnswer([]byte("null"), jsonrpc.CodeInvalidRequest, "a batch has at most "+strconv.Itoa(MaxBatch)+" messages; send several"))
		return true, nil
	case call == nil:
		return false, nil
	case session == "" && method != "initialize" && method != "server/discover":
		writeError(w, http.StatusBadRequest, errorAnswer(call, jsonrpc.CodeInvalidRequest, "the header Mcp-Session-Id is missing: begin with initialize, and send the id of the session that it opens"))
		return true, nil
	case !methods[method]:
		writeError(w, http.StatusOK, s.notThere(call, method))
		return true, nil
	}
	return false, nil
}

// readBody reads the beginning of a body and leaves the request with the whole of it.
func readBody(r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(r.Body, BodyLimit+1))
	r.Body = readCloser{io.MultiReader(bytes.NewReader(body), r.Body), r.Body}
	return body, err
}

// callOf is what a body calls, with the id of the call; nil for what is too large, a
// batch, no JSON, an answer or a notification.
func callOf(body []byte) (method string, id []byte) {
	if len(body) > BodyLimit || jsonspan.KindOf(body) != jsonspan.KindObject {
		return "", nil
	}
	method, _ = jsonspan.String(jsonspan.Member(body, "method"))
	id = jsonspan.Member(body, "id")
	if kind := jsonspan.KindOf(id); method == "" || kind != jsonspan.KindString && kind != jsonspan.KindNumber {
		return "", nil
	}
	return method, id
}

// tooMany tells whether a body is a batch of more than MaxBatch messages, each of which
// costs far more to decode than to write.
func tooMany(body []byte) bool {
	if jsonspan.KindOf(bytes.TrimLeft(body[:min(len(body), 64)], " \t\r\n")) != jsonspan.KindArray {
		return false
	}
	n := 0
	for w := jsonspan.Array(body); n <= MaxBatch && w.Next(); n++ {
	}
	return n > MaxBatch
}

// notThere is the protocol's answer to a call of a method that is not there.
func (s *Server) notThere(id []byte, method string) []byte {
	s.stats.request(method)
	return errorAnswer(id, jsonrpc.CodeMethodNotFound, "method not found: "+clean(method, maxTitle))
}

type readCloser struct {
	io.Reader
	io.Closer
}

// errorAnswer is an answer of JSON-RPC.
func errorAnswer(id []byte, code int, message string) []byte {
	answer := append(append([]byte(`{"jsonrpc":"2.0","id":`), id...), `,"error":{"code":`...)
	answer = jsonspan.AppendString(append(strconv.AppendInt(answer, int64(code), 10), `,"message":`...), message)
	return append(answer, "}}"...)
}

func writeError(w http.ResponseWriter, status int, answer []byte) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(answer, '\n')) // the client is gone if this fails
}
