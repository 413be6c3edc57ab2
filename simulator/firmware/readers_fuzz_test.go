package firmware

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/jsontest"
)

// surrogate is an escape that cJSON refuses unless it is half of a pair.
var surrogate = regexp.MustCompile(`\\u[dD][89a-fA-F]`)

// FuzzCJSON: what encoding/json accepts is read here too, with the same meaning, half a pair of surrogates and the
// deepest nesting aside. Text ends at a NUL.
func FuzzCJSON(f *testing.F) {
	for _, s := range []string{`{"type":"mcp","payload":{"id":1}}`, `[[[]]]`, `{"a":"\ud83d\ude00\u0000"}`, `-1e5x`, "\xef\xbb\xbf{}", `[1.5E-3,-0,1e400,"\/\b\f\n\r\t\"\\é",null,true,false]`,
		`{"A":1,"a":2,"":{}}`, `"\ud83d"`} {
		f.Add([]byte(s))
	}
	var d jsonDoc
	f.Fuzz(func(t *testing.T, data []byte) {
		root, err := d.parse(data)
		if err != nil {
			if json.Valid(data) && !surrogate.Match(data) && jsontest.Depth(data) <= maxDepth {
				t.Fatalf("%q: %v", data, err)
			}
			return
		}
		if json.Valid(data) {
			compareJSON(t, bytes.Trim(data, " \t\r\n"), root)
		}
		root.each(func(key string, item value) {
			if root.is(jsonObject) && !root.get(key).ok() {
				t.Errorf("key %q is listed and not found", key)
			}
			_ = item.int32()
		})
	})
}

func compareJSON(t *testing.T, data []byte, v value) {
	switch data[0] {
	case '{', '[':
		list, err := jsontest.Members(data)
		if err != nil || v.is(jsonObject) != (data[0] == '{') || v.is(jsonArray) != (data[0] == '[') {
			t.Fatalf("%q: %v", data, err)
		}
		i := 0
		v.each(func(key string, item value) {
			if i < len(list) {
				compareText(t, list[i].Key, key)
				compareJSON(t, []byte(list[i].Value), item)
			}
			i++
		})
		if i != len(list) {
			t.Fatalf("%q has %d items, encoding/json finds %d", data, i, len(list))
		}
	case '"':
		var text string
		if err := json.Unmarshal(data, &text); err != nil || !v.is(jsonString) {
			t.Fatalf("%q: %v", data, err)
		}
		compareText(t, text, v.string())
	case 't', 'f', 'n':
		if v.is(jsonTrue) != (data[0] == 't') || v.is(jsonFalse) != (data[0] == 'f') || v.is(jsonNull) != (data[0] == 'n') {
			t.Fatalf("%q is read as another literal", data)
		}
	default:
		var n float64
		if err := json.Unmarshal(data, &n); !v.is(jsonNumber) || err == nil && v.number() != n {
			t.Fatalf("%s is %v: %v", data, v.number(), err)
		}
	}
}

// compareText passes over text that encoding/json has to repair.
func compareText(t *testing.T, want, got string) {
	want, _, _ = strings.Cut(want, "\x00")
	if got != want && !strings.Contains(want, "\ufffd") {
		t.Fatalf("%q is read as %q", want, got)
	}
}

// FuzzFrameReader compares the reader of a stream with one that has all bytes at once.
func FuzzFrameReader(f *testing.F) {
	f.Add([]byte("\x81\x02hi\x82\x7e\x00\x80"))
	f.Add([]byte("\x81\x85\x01\x02\x03\x04hello"))
	f.Add([]byte("\x82\x7f\x00\x00\x00\x00\x00\x00\x00\x01x"))
	f.Add([]byte("\x02\x7e\x00\x03abc\x80\xff\x00\x00\x00\x00\x00\x00\x00\x02\x01\x02\x03\x04yz\x88\x00"))
	f.Add(append([]byte{0x82, 0x7e, 0, 40}, bytes.Repeat([]byte("frames over the buffer"), 4)...))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := frameReader{byteReader{src: bytes.NewReader(data), buf: make([]byte, 32)}}
		for {
			got, err := r.next()
			want, rest, wantErr := sliceFrame(data)
			if errors.Is(err, errMemory) != errors.Is(wantErr, errMemory) || (err == nil) != (wantErr == nil) {
				t.Fatalf("%x: %v, want %v", data, err, wantErr)
			}
			if err != nil {
				return
			}
			if got.fin != want.fin || got.opcode != want.opcode || !bytes.Equal(got.payload, want.payload) {
				t.Fatalf("%x: %+v, want %+v", data, got, want)
			}
			data = rest
		}
	})
}

// sliceFrame takes one frame off data (RFC 6455, section 5.2).
func sliceFrame(data []byte) (f frame, rest []byte, err error) {
	var head struct{ First, Second byte }
	r := bytes.NewReader(data)
	if err := binary.Read(r, binary.BigEndian, &head); err != nil {
		return f, nil, err
	}
	size := uint64(head.Second & 0x7f)
	var short uint16
	switch size {
	case 126:
		err = binary.Read(r, binary.BigEndian, &short)
		size = uint64(short)
	case 127:
		err = binary.Read(r, binary.BigEndian, &size)
	}
	mask := make([]byte, 4)
	if head.Second&0x80 != 0 && err == nil {
		_, err = io.ReadFull(r, mask)
	}
	if err != nil {
		return f, nil, err
	}
	if size > maxIncoming {
		return f, nil, errMemory
	}
	payload := make([]byte, min(size, uint64(len(data))+1))
	if _, err := io.ReadFull(r, payload); err != nil {
		return f, nil, err
	}
	for i := range payload {
		payload[i] ^= mask[i%4]
	}
	return frame{fin: head.First >= 0x80, opcode: head.First % 16, payload: payload}, data[len(data)-r.Len():], nil
}

// FuzzMQTTReader compares with paho, packet by packet. paho reads a length of four bytes that announces a fifth, which
// is refused here, and refuses types that do not exist, which the device passes over.
func FuzzMQTTReader(f *testing.F) {
	f.Add([]byte("\x20\x02\x00\x00\x30\x05\x00\x01tab"))
	f.Add([]byte("\x32\x80\x01\x00\x01t\x00\x07"))
	f.Add([]byte("\x30\xff\xff\xff\xff\x7f"))
	f.Add([]byte("\x30\xff\xff\xff\x7f"))
	f.Add([]byte("\x34\x07\x00\x01t\x00\x07hi\x40\x02\x00\x07\x30\x02\x00\x05\xf0\x01x\xd0\x00"))
	f.Add(append([]byte{0x30, 43, 0, 1, 't'}, bytes.Repeat([]byte("0123456789"), 4)...))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := mqttReader{byteReader{src: bytes.NewReader(data), buf: make([]byte, 32)}}
		for {
			p, err := r.next()
			length, used := binary.Uvarint(data[min(1, len(data)):]) // the coding of the remaining length
			whole := used > 0 && used <= 4 && length <= uint64(len(data)-1-used)
			if (err == nil) != whole {
				t.Fatalf("%x: %v", data, err)
			}
			if err != nil {
				return
			}
			end := 1 + used + int(length)
			if p.kind != data[0]/16 || p.flags != data[0]%16 || !bytes.Equal(p.body, data[1+used:end]) {
				t.Fatalf("%x: %+v", data, p)
			}
			if p.kind == mqttPublish {
				comparePublish(t, p, data[:end])
			}
			data = data[end:]
		}
	})
}

func comparePublish(t *testing.T, p mqttPacket, packet []byte) {
	payload, qos, id, err := p.publish()
	theirs, theirErr := packets.ReadPacket(bytes.NewReader(packet))
	if (err == nil) != (theirErr == nil) {
		t.Fatalf("%x: %v, paho: %v", packet, err, theirErr)
	}
	if err != nil {
		return
	}
	if m := theirs.(*packets.PublishPacket); !bytes.Equal(payload, m.Payload) || qos != m.Qos || id != m.MessageID {
		t.Fatalf("%x: %q %d %d, paho reads %v", packet, payload, qos, id, m)
	}
}
