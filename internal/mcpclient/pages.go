package mcpclient

import (
	"bytes"
	"hash/maphash"
	"strconv"
	"sync"
)

// A fleet has many devices and few firmwares: most pages of tools are, byte for
// byte, one that was received before. This page is valid JSON and its tools are known, so
// that an envelope which ends with it is not read again: three walks over 8 KB each
// become a hash and a comparison.
const (
	maxKnownPages = 512 // of at most pageSize bytes, twice
	minKnownPage  = 512 // bytes; what is shorter costs little
)

// knownPage is one result of tools/list in which all elements are tools. It is
// never changed.
type knownPage struct {
	result []byte // as the device sent it
	tools  []byte // its tools, joined by commas
	count  int
	next   string // cursor
}

// knownPages are shared by all clients of the process.
type knownPages struct {
	seed maphash.Seed

	mu    sync.RWMutex
	pages map[uint64]*knownPage
}

var known = knownPages{seed: maphash.MakeSeed(), pages: map[uint64]*knownPage{}}

func (k *knownPages) find(result []byte) *knownPage {
	sum := maphash.Bytes(k.seed, result)
	k.mu.RLock()
	defer k.mu.RUnlock()
	if p := k.pages[sum]; p != nil && bytes.Equal(p.result, result) {
		return p
	}
	return nil
}

// add keeps a page; where there is no room for it, another one leaves.
func (k *knownPages) add(result, tools []byte, count int, next string) {
	if len(result) < minKnownPage || len(result) >= pageSize {
		return
	}
	sum := maphash.Bytes(k.seed, result)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.pages[sum] != nil {
		return
	}
	for any := range k.pages {
		if len(k.pages) < maxKnownPages {
			break
		}
		delete(k.pages, any)
	}
	k.pages[sum] = &knownPage{result: bytes.Clone(result), tools: bytes.Clone(tools), count: count, next: next}
}

// HandleKnown takes an envelope that is the answer to a request, as the firmware
// writes it (websocket_protocol.cc:94-98, mcp_server.cc:430-441), and holds a page of
// tools that came before. Of any other envelope it takes nothing, and returns false.
// The rules of Handle apply.
func (c *Client) HandleKnown(envelope []byte) bool {
	id, result, ok := cutAnswer(envelope)
	if !ok || len(result) < minKnownPage || len(result) >= pageSize {
		return false
	}
	page := known.find(result)
	if page == nil {
		return false
	}
	if w, ok := c.takeAnswered(id); ok {
		w.hand(answer{result: page.result, page: page})
	}
	return true
}

var (
	answerHead   = []byte(`{"session_id":"`)
	answerMCP    = []byte(`","type":"mcp","payload":{"jsonrpc":"2.0","id":`)
	answerResult = []byte(`,"result":`)
	answerEnd    = []byte(`}}`)
)

// cutAnswer takes an answer apart that the firmware has put together as text.
func cutAnswer(envelope []byte) (id int32, result []byte, ok bool) {
	rest, head := bytes.CutPrefix(envelope, answerHead)
	rest, end := bytes.CutSuffix(rest, answerEnd)
	if !head || !end {
		return 0, nil, false
	}
	n := 0
	for n < len(rest) && (rest[n] >= 'a' && rest[n] <= 'z' || rest[n] >= '0' && rest[n] <= '9' || rest[n] == '-') { // as this server names sessions
		n++
	}
	if rest, ok = bytes.CutPrefix(rest[n:], answerMCP); !ok {
		return 0, nil, false
	}
	for n = 0; n < len(rest) && rest[n] >= '0' && rest[n] <= '9'; n++ {
		continue
	}
	number, err := strconv.ParseInt(string(rest[:min(n, 11)]), 10, 32)
	if err != nil || number < 1 || rest[0] == '0' {
		return 0, nil, false
	}
	result, ok = bytes.CutPrefix(rest[n:], answerResult)
	return int32(number), result, ok
}
