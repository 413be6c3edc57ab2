package envelope

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"fleetd/internal/jsonspan"
	"fleetd/internal/jsontest"
)

func vector(t *testing.T, name string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "testdata", "vectors", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func TestParseDeviceMessages(t *testing.T) {
	var v struct{ Messages map[string]string }
	vector(t, "device_text_messages", &v)
	for name, text := range v.Messages {
		m, err := Parse([]byte(text))
		if strings.Contains(name, "invalid_json") {
			if !errors.Is(err, jsonspan.ErrSyntax) {
				t.Errorf("%s: got %v, want ErrSyntax", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var want struct {
			Type      string
			SessionID string `json:"session_id"`
			Payload   json.RawMessage
		}
		if err := json.Unmarshal([]byte(text), &want); err != nil {
			t.Fatal(err)
		}
		if string(m.Type) != want.Type || string(m.SessionID) != want.SessionID || !bytes.Equal(m.Payload, want.Payload) {
			t.Errorf("%s: got %s %s %s", name, m.Type, m.SessionID, m.Payload)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]error{
		`{}`: ErrNoType, `{"type":1}`: ErrNoType, `[]`: jsonspan.ErrType, `"mcp"`: jsonspan.ErrType,
		`{"type":"mcp"`: jsonspan.ErrSyntax, "{\"type\":\"m\xffcp\"}": jsonspan.ErrUTF8,
		`{"type":"mcp","payload":` + strings.Repeat(`{"a":`, 10000): jsonspan.ErrDepth,
	} {
		if _, err := Parse([]byte(text)); !errors.Is(err, want) {
			t.Errorf("%.40s: got %v, want %v", text, err, want)
		}
	}
}

func TestFirstOfDuplicateKeysCounts(t *testing.T) {
	m, err := Parse([]byte(`{"type":"mcp","type":"tts","payload":1,"payload":2,"session_id":"a","session_id":"b"}`))
	if err != nil || string(m.Type) != "mcp" || string(m.Payload) != "1" || string(m.SessionID) != "a" {
		t.Errorf("got %s %s %s, %v", m.Type, m.Payload, m.SessionID, err)
	}
}

func TestAppendMCPMatchesVectors(t *testing.T) {
	var v struct {
		Exchanges []struct {
			Sends string `json:"server_sends"`
		}
	}
	vector(t, "mcp_initialize", &v)
	for _, x := range v.Exchanges {
		m, err := Parse([]byte(x.Sends))
		if err != nil {
			t.Fatal(err)
		}
		if got := AppendMCP(nil, string(m.SessionID), m.Payload); string(got) != x.Sends {
			t.Errorf("got %s\nwant %s", got, x.Sends)
		}
	}
}

func TestFrameVectors(t *testing.T) {
	for framing, name := range map[Framing]string{1: "ws_binary_v1", 2: "ws_binary_v2", 3: "ws_binary_v3"} {
		var v struct {
			Frames []struct {
				Timestamp  uint32
				OpusHex    string `json:"opus_hex"`
				MessageHex string `json:"message_hex"`
			}
		}
		vector(t, name, &v)
		if len(v.Frames) == 0 {
			t.Fatalf("%s has no frames", name)
		}
		for i, f := range v.Frames {
			opus, _ := hex.DecodeString(f.OpusHex)
			msg, _ := hex.DecodeString(f.MessageHex)
			stamp := f.Timestamp
			if framing != Framing2 {
				stamp = 0
			}
			got, err := framing.ParseFrame(msg)
			if err != nil || got.Timestamp != stamp || !bytes.Equal(got.Opus, opus) {
				t.Errorf("%s frame %d: got %+v, %v", name, i, got, err)
			}
			if out, err := framing.AppendFrame(nil, Frame{f.Timestamp, opus}); err != nil || !bytes.Equal(out, msg) {
				t.Errorf("%s frame %d: wrote %x, %v", name, i, out, err)
			}
		}
	}
}

func TestFrameMalformed(t *testing.T) {
	var v struct {
		Cases []struct {
			Protocol   int
			MessageHex string `json:"message_hex"`
			Reason     string
		}
	}
	vector(t, "ws_binary_malformed", &v)
	for _, c := range v.Cases {
		msg, _ := hex.DecodeString(c.MessageHex)
		if f, err := FramingOf(c.Protocol).ParseFrame(msg); err == nil {
			t.Errorf("%s: accepted as %+v", c.Reason, f)
		}
	}
	for _, f := range []Framing{1, 2, 3} {
		if _, err := f.ParseFrame(nil); err == nil {
			t.Errorf("framing %d accepts an empty message", f)
		}
		if _, err := f.AppendFrame(nil, Frame{}); !errors.Is(err, ErrFrameEmpty) {
			t.Errorf("framing %d writes an empty packet: %v", f, err)
		}
	}
	for name, c := range map[string]struct {
		framing Framing
		message string
		want    error
	}{
		"2, header cut by a byte": {2, "\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00", ErrFrameShort},
		"3, header cut by a byte": {3, "\x00\x00\x00", ErrFrameShort},
		"3, another type":         {3, "\x01\x00\x00\x01a", ErrFrameType},
		"3, too little announced": {3, "\x00\x00\x00\x01ab", ErrFrameLength},
		"3, too much announced":   {3, "\x00\x00\x00\x03ab", ErrFrameLength},
	} {
		if f, err := c.framing.ParseFrame([]byte(c.message)); !errors.Is(err, c.want) {
			t.Errorf("framing %s: %+v, %v", name, f, err)
		}
	}
	// The length field of framing 3 ends where a device's messages do.
	for size, want := range map[int]error{MaxDeviceMessage: nil, MaxDeviceMessage + 1: ErrFrameLength} {
		if _, err := Framing3.AppendFrame(nil, Frame{Opus: make([]byte, size)}); !errors.Is(err, want) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	if FramingOf(4) != Framing1 {
		t.Error("version 4 is framed like 1")
	}
}

// FuzzParse compares with what encoding/json reads: of each member the first of
// the right type.
func FuzzParse(f *testing.F) {
	for _, msg := range []string{`{"session_id":"a","type":"mcp","payload":{"id":1}}`, `{"type":"listen","text":"say "hi""}`, `{"type":5,"type":"a\u0062","payload":null,"payload":1}`,
		`{"session_id":null,"session_id":"","session_id":"b","type":""}`, `{"\u0074ype":"x"} `, `[{"type":"x"}]`} {
		f.Add([]byte(msg))
	}
	f.Fuzz(func(t *testing.T, msg []byte) {
		m, err := Parse(msg)
		list, wrong := jsontest.ObjectMembers(msg)
		kind, session, payload := "none", "", ""
		typed, hasSession := false, false
		for _, member := range list {
			text, isText := member.Text()
			switch {
			case member.Key == "type" && isText && !typed:
				kind, typed = text, true
			case member.Key == "session_id" && isText && !hasSession:
				session, hasSession = text, true
			case member.Key == "payload" && payload == "":
				payload = member.Value
			}
		}
		if want := wrong == nil && typed && utf8.Valid(msg); (err == nil) != want && !errors.Is(err, jsonspan.ErrDepth) {
			t.Fatalf("%q: %v, want %t", msg, err, want)
		}
		if err == nil && (string(m.Type) != kind || string(m.SessionID) != session || (m.SessionID != nil) != hasSession || string(m.Payload) != payload) {
			t.Errorf("%q is %q %q %q, want %q %q %q", msg, m.Type, m.SessionID, m.Payload, kind, session, payload)
		}
	})
}

func FuzzFrame(f *testing.F) {
	f.Add(uint8(1), []byte("a"))
	f.Add(uint8(3), []byte("\x00\x01\x00\x01a"))
	f.Add(uint8(2), []byte("\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01a"))
	f.Fuzz(func(t *testing.T, version uint8, msg []byte) {
		framing := FramingOf(int(version % 4))
		frame, err := framing.ParseFrame(msg)
		want, valid := readFrame(int(framing), msg)
		if (err == nil) != valid || err == nil && (frame.Timestamp != want.Timestamp || !bytes.Equal(frame.Opus, want.Opus)) {
			t.Fatalf("%x in framing %d is %+v, %v; want %+v, %t", msg, framing, frame, err, want, valid)
		}
		if err != nil {
			return
		}
		out, err := framing.AppendFrame(nil, frame)
		if err != nil {
			if len(frame.Opus) <= MaxDeviceMessage {
				t.Fatalf("accepted %x but cannot write it: %v", msg, err)
			}
			return
		}
		again, err := framing.ParseFrame(out)
		if err != nil || !bytes.Equal(again.Opus, frame.Opus) || again.Timestamp != frame.Timestamp {
			t.Fatalf("round trip of %x gave %+v, %v", msg, again, err)
		}
	})
}

// readFrame reads the structs of protocol.h:17-31 by their layout.
func readFrame(version int, msg []byte) (frame Frame, ok bool) {
	var v2 struct {
		Version, Type             uint16
		Reserved, Timestamp, Size uint32
	}
	var v3 struct {
		Type, Reserved uint8
		Size           uint16
	}
	r := bytes.NewReader(msg)
	size := uint32(len(msg))
	switch version {
	case 2:
		if binary.Read(r, binary.BigEndian, &v2) != nil || v2.Version != 2 || v2.Type != 0 {
			return Frame{}, false
		}
		size = v2.Size
	case 3:
		if binary.Read(r, binary.BigEndian, &v3) != nil || v3.Type != 0 {
			return Frame{}, false
		}
		size = uint32(v3.Size)
	}
	return Frame{Timestamp: v2.Timestamp, Opus: msg[len(msg)-r.Len():]}, r.Len() > 0 && size == uint32(r.Len())
}
