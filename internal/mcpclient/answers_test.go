package mcpclient

import (
	"fmt"
	"sync"
	"testing"
)

// Of an error the first code and message count; of one that breaks the envelope
// its text does to the end, whatever it quotes.
func TestErrorsOfDevices(t *testing.T) {
	for reply, want := range map[string]string{
		`{"jsonrpc":"2.0","id":%s,"error":{"code":-5,"message":"first","code":-6,"message":"second"}}`:            "device answers error -5: first",
		`!{"session_id":"s","type":"mcp","payload":{"jsonrpc":"2.0","id":%s,"error":{"message":"not "}}} but"}}}`: `device answers error -32000: not "}}} but`,
	} {
		s := newScripted(nil)
		s.reply = func(payload []byte) []string { return []string{fmt.Sprintf(reply, parse(t, payload).ID)} }
		if _, err := s.client.Request(t.Context(), "x", nil); err == nil || err.Error() != want {
			t.Errorf("%s: %v", reply, err)
		}
	}
}

// Requests may come from any number of goroutines.
func TestConcurrentRequests(t *testing.T) {
	s := newScripted(nil)
	s.reply = func(payload []byte) []string {
		id := string(parse(t, payload).ID)
		return []string{`{"jsonrpc":"2.0","id":` + id + `,"result":{"of":` + id + `}}`}
	}
	var all sync.WaitGroup
	answers := make(chan string, 8*50)
	for range 8 {
		all.Go(func() {
			for range 50 {
				result, err := s.client.Request(t.Context(), "x", nil)
				if err != nil {
					t.Error(err)
				}
				answers <- string(result)
			}
		})
	}
	all.Wait()
	close(answers)
	seen := map[string]bool{}
	for a := range answers {
		if seen[a] {
			t.Errorf("%s came twice", a)
		}
		seen[a] = true
	}
}
