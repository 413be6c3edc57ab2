package firmware

import "testing"

// discard is a link that throws everything away.
type discard struct{}

func (discard) write(opcode byte, room *[]byte) error {
	sealFrame(*room, opcode, [4]byte{1, 2, 3, 4})
	return nil
}

func (discard) drop() {}

// BenchmarkCall is the device's share of one tool call without the sockets.
func BenchmarkCall(b *testing.B) {
	o, err := parseFlags([]string{"--devices", "1"}, b.Output())
	if err != nil {
		b.Fatal(err)
	}
	f, err := New(o)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	d := f.devices[0]
	d.out, d.opened = discard{}, true
	f.callsLeft.Store(0)
	s := &session{device: d}
	msg := []byte(`{"session_id":"s-123456","type":"mcp","payload":{"jsonrpc":"2.0","method":"tools/call","params":{"name":"self.audio_speaker.set_volume","arguments":{"volume":50}},"id":30}}`)
	b.ReportAllocs()
	for b.Loop() {
		s.text(msg)
	}
	if d.stats.calls != uint64(b.N) {
		b.Fatalf("%d calls executed, %d sent", d.stats.calls, b.N)
	}
}
