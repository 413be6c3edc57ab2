package access

import (
	"encoding/json"
	"sync"

	"fleetd/internal/jsonspan"
)

func (c *Caller) encode() []byte {
	b, err := json.Marshal(c)
	if err != nil {
		return []byte(`{}`) // cannot fail; without rights if it did
	}
	return b
}

// AppendPrincipal appends a principal as one line of JSON, for a header to another node of the
// fleet: nothing for Fleet. The sender signs it.
func AppendPrincipal(dst []byte, b Principal) []byte {
	if b.Caller == Fleet {
		return dst
	}
	dst = jsonspan.AppendString(append(dst, `{"via":`...), string(b.Via))
	dst = jsonspan.AppendString(append(dst, `,"from":`...), b.From)
	dst = append(dst, `,"who":`...)
	if b.Caller == nil {
		return append(dst, "null}"...)
	}
	return append(append(dst, b.Caller.wire...), '}')
}

// Reader parses the results of AppendPrincipal, and creates each caller once.
type Reader struct {
	mu    sync.Mutex
	known map[string]*Caller // by their encoding
}

// maxKnown is how many callers are cached: about as many as keys can be in use.
const maxKnown = 4096

// Parse parses a header. One that cannot be parsed gives a principal without rights.
func (r *Reader) Parse(header string) Principal {
	if header == "" {
		return Principal{Caller: Fleet}
	}
	var b Principal
	walk := jsonspan.Object([]byte(header))
	var who []byte
	for walk.Next() {
		switch string(walk.Key()) {
		case "via":
			via, _ := jsonspan.String(walk.Value())
			b.Via = Via(via)
		case "from":
			b.From, _ = jsonspan.String(walk.Value())
		case "who":
			who = walk.Value()
		}
	}
	if walk.Err() != nil {
		return Principal{}
	}
	b.Caller = r.caller(who)
	return b
}

func (r *Reader) caller(who []byte) *Caller {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.known[string(who)]; c != nil {
		return c
	}
	var c *Caller
	if err := json.Unmarshal(who, &c); err != nil || c == nil || c.Key == "" {
		return nil
	}
	if r.known == nil || len(r.known) >= maxKnown {
		r.known = map[string]*Caller{}
	}
	c.derive()
	r.known[string(who)] = c
	return c
}
