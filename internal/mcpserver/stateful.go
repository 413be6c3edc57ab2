package mcpserver

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strconv"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"

	"fleetd/internal/cleantext"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// methods are the methods of a server in revisions with sessions.
var methods = map[string]bool{"initialize": true, "ping": true, "server/discover": true, "tools/list": true, "tools/call": true, "resources/list": true,
	"resources/templates/list": true, "resources/read": true, "resources/subscribe": true, "resources/unsubscribe": true, "prompts/list": true,
	"prompts/get": true, "completion/complete": true, "logging/setLevel": true}

// serveStateful serves revisions with sessions. An existing session must belong to the
// caller and to this path; a new one needs a slot.
func (s *Server) serveStateful(w http.ResponseWriter, r *http.Request, v *requestInfo) {
	h := s.endpointOf(v).stateful
	id := r.Header.Get("Mcp-Session-Id")
	if r.Method == http.MethodPost {
		answered, err := s.answerPost(w, r, v, id)
		if err != nil {
			s.refuse(w, r, refuse(refusedBody, devices.CodeBadRequest, "the request body is incomplete"))
			return
		}
		if answered {
			return
		}
	}
	if id != "" || r.Method != http.MethodPost {
		leave, denied := s.sessions.enterSession(id, v)
		if denied != nil {
			s.refuse(w, r, denied)
			return
		}
		defer leave()
		if r.Method == http.MethodGet {
			v.request.stream.Store(true)
			if denied := s.sessions.takeOver(r.Context(), id, r.Header.Get("Last-Event-ID"), v.request); denied != nil {
				s.refuse(w, r, denied)
				return
			}
		}
		h.ServeHTTP(w, r)
		return
	}
	slot, denied := s.sessions.reserve(v)
	if denied != nil {
		s.refuse(w, r, denied)
		return
	}
	defer slot.release()
	v.slot = slot
	h.ServeHTTP(w, r)
}

// answerPost answers requests to which the SDK would respond outside the protocol: an
// unknown method, and a request without the session that it needs. Each message of a batch is a unit of
// work, since the SDK decodes all of them before it begins any.
func (s *Server) answerPost(w http.ResponseWriter, r *http.Request, v *requestInfo, session string) (answered bool, err error) {
	body, err := readBody(r)
	if err != nil {
		return false, err
	}
	batch := batchSize(body)
	if batch > MaxBatch {
		writeError(w, http.StatusBadRequest, errorAnswer([]byte("null"), jsonrpc.CodeInvalidRequest, "a batch has at most "+strconv.Itoa(MaxBatch)+" messages; send several"))
		return true, nil
	}
	if !s.beginRequest(w, r, v, int64(batch)) {
		return true, nil
	}
	method, call := callOf(body)
	switch {
	case call == nil:
		return false, nil
	case session == "" && method != "initialize" && method != "server/discover":
		writeError(w, http.StatusBadRequest, errorAnswer(call, jsonrpc.CodeInvalidRequest, "the header Mcp-Session-Id is missing: send initialize first, then the id of the session that it opens"))
		return true, nil
	case !methods[method]:
		writeError(w, http.StatusOK, s.methodNotFound(call, method))
		return true, nil
	}
	return false, nil
}

// readBody reads a body up to the limit, and lets the request be read again from its start.
func readBody(r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(r.Body, BodyLimit+1))
	r.Body = readCloser{io.MultiReader(bytes.NewReader(body), r.Body), r.Body}
	return body, err
}

// refuseBatch answers a batch in a revision that has none, before the SDK decodes all of it. Small bodies are left to
// the SDK.
func refuseBatch(w http.ResponseWriter, r *http.Request) (refused bool) {
	if r.Method != http.MethodPost || r.ContentLength >= 0 && r.ContentLength <= connlimit.BodyWork {
		return false
	}
	body, err := readBody(r)
	if err != nil || !isBatch(body) { // the SDK sees an error, too
		return false
	}
	writeError(w, http.StatusBadRequest, errorAnswer([]byte("null"), jsonrpc.CodeInvalidRequest, "this revision has no batches; send each message in a request of its own"))
	return true
}

// maxID is the highest id of a request that is answered with the same one: the SDK reads numbers as float64, and cuts fractions off.
const maxID = 1 << 53

// refuseID answers a body with an id that would be answered with another one: its host would wait in vain, or take the answer for that of
// another request. Nothing of a batch with such an id is done.
func refuseID(w http.ResponseWriter, r *http.Request) (refused bool) {
	if r.Method != http.MethodPost {
		return false
	}
	body, err := readBody(r)
	if err != nil || len(body) > BodyLimit { // the SDK sees that, too
		return false
	}
	id := changedID(body)
	if id == nil {
		return false
	}
	writeError(w, http.StatusBadRequest, errorAnswer(id, jsonrpc.CodeInvalidRequest, "the id of a request must be text, or an integer of at most 2^53: others would be answered with another id"))
	return true
}

// changedID returns the first id of a message, or of those of a batch that are read, that is a number which does not stay the same.
func changedID(body []byte) []byte {
	if isBatch(body) {
		n := 0
		for w := jsonspan.Array(body); n <= MaxBatch && w.Next(); n++ {
			if isBatch(w.Value()) {
				continue // it is no message
			}
			if id := changedID(w.Value()); id != nil {
				return id
			}
		}
		return nil
	}
	for w := jsonspan.Object(body); w.Next(); {
		if id := w.Value(); string(w.Key()) == "id" && jsonspan.KindOf(id) == jsonspan.KindNumber {
			if n, ok := jsonspan.Int(id); !ok || n > maxID || n < -maxID {
				return id
			}
		}
	}
	return nil
}

// isBatch reports whether a body is an array, after the white space of RFC 8259, section 2.
func isBatch(body []byte) bool {
	return jsonspan.KindOf(bytes.TrimLeft(body, " \t\r\n")) == jsonspan.KindArray
}

// callOf returns the method and the id of a call. Both are empty for a body that is
// too large or not JSON, and for batches, responses and notifications.
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

// batchSize returns the number of messages of a batch, and at most one more than MaxBatch, also if they cannot be
// counted; 0 for a body that is none. Decoding a message costs far more than sending it.
func batchSize(body []byte) (n int) {
	if !isBatch(body) {
		return 0
	}
	w := jsonspan.Array(body)
	for n <= MaxBatch && w.Next() {
		n++
	}
	if errors.Is(w.Err(), jsonspan.ErrDepth) {
		return MaxBatch + 1
	}
	return n
}

// methodNotFound returns the error for an unknown method.
func (s *Server) methodNotFound(id []byte, method string) []byte {
	s.stats.request(method)
	return errorAnswer(id, jsonrpc.CodeMethodNotFound, "method not found: "+cleantext.Short(method, maxTitle))
}

type readCloser struct {
	io.Reader
	io.Closer
}

// errorAnswer returns a JSON-RPC error response.
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
	_, _ = w.Write(append(answer, '\n')) // fails only if the client has disconnected
}
