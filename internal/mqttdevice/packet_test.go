package mqttdevice

import (
	"bytes"
	"errors"
	"testing"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/devices"
)

func TestParseHeader(t *testing.T) {
	for _, c := range []struct {
		bytes  []byte
		length int
		ok     bool
		err    error
	}{
		{nil, 0, false, nil},
		{[]byte{0x30}, 0, false, nil},
		{[]byte{0x30, 0x7f}, 127, true, nil},
		{[]byte{0x30, 0x80}, 0, false, nil},
		{[]byte{0x30, 0x80, 0x01}, 128, true, nil},
		{[]byte{0x30, 0xff, 0xff, 0x03}, 65535, true, nil},
		{[]byte{0x30, 0xff, 0xff, 0xff, 0x7f}, 0, false, errTooLarge},
		{[]byte{0x30, 0xff, 0xff, 0xff, 0xff}, 0, false, errLength},
		{[]byte{0x00, 0}, 0, false, errType}, {[]byte{0xf0, 0}, 0, false, errType}, {[]byte{0x20, 2}, 0, false, errType},
		{[]byte{0x36, 0}, 0, false, errFlags}, {[]byte{0x81, 0}, 0, false, errFlags}, {[]byte{0xc1, 0}, 0, false, errFlags},
	} {
		h, ok, err := parseHeader(c.bytes, PacketLimit)
		if ok != c.ok || !errors.Is(err, c.err) || ok && h.length != c.length {
			t.Errorf("%x: %+v, %t, %v", c.bytes, h, ok, err)
		}
	}
}

// What is written here is what paho reads.
func TestAppendPublish(t *testing.T) {
	for _, size := range []int{0, 1, 100, 127, 128, 16_383, 16_384, 200_000} {
		payload := bytes.Repeat([]byte{'x'}, size)
		p, err := packets.ReadPacket(bytes.NewReader(appendPublish(nil, "fleetd/d/down", payload)))
		if err != nil {
			t.Fatalf("%d: %v", size, err)
		}
		if m := p.(*packets.PublishPacket); m.TopicName != "fleetd/d/down" || !bytes.Equal(m.Payload, payload) || m.Qos != 0 || m.Retain || m.Dup {
			t.Errorf("%d: %v", size, m)
		}
	}
}

func TestTopics(t *testing.T) {
	const id = devices.ID("aa:bb:cc:dd:ee:ff")
	for topic, own := range map[string]bool{"fleetd/aabbccddeeff/up": true, "fleetd/aabbccddeeff/down": false, "fleetd/aabbccddee/up": false,
		"fleetd/aabbccddeeff0/up": false, "fleetd/up": false, "fleetd//up": false, "": false, "fleetd/aa:bb:cc:dd:ee:ff/up": false} {
		if isTopicUp([]byte(topic), id) != own {
			t.Errorf("%q: want %t", topic, own)
		}
		if (topic == devices.TopicUp(id)) != own {
			t.Errorf("%q: the two disagree", topic)
		}
	}
	for topic, want := range map[string]string{"fleetd/aabbccddeeff/up": "aa:bb:cc:dd:ee:ff up", "fleetd/lamp-1/connected": "lamp-1 connected",
		"fleetd/AABBCCDDEEFF/up": "", "fleetd/x": "", "up": "", "other/x/up": "", "fleetd/+/up": ""} {
		id, leaf, err := deviceOfTopic(topic)
		if (err == nil) != (want != "") || err == nil && string(id)+" "+leaf != want {
			t.Errorf("%q: %s %s %v", topic, id, leaf, err)
		}
	}
}

// Nothing is allocated to take a PUBLISH apart or to write one.
func TestPublishAllocatesNothing(t *testing.T) {
	packet := appendPublish(nil, "fleetd/aabbccddeeff/up", []byte(`{"type":"mcp","payload":{}}`))
	buf := make([]byte, 0, 256)
	if n := testing.AllocsPerRun(100, func() {
		h, _, err := parseHeader(packet, PacketLimit)
		p, parseErr := parsePublish(h, packet[h.size:])
		if err != nil || parseErr != nil || !isTopicUp(p.topic, "aa:bb:cc:dd:ee:ff") {
			t.Fatal(err, parseErr)
		}
		buf = appendPublish(buf[:0], "fleetd/aabbccddeeff/down", p.payload)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzPacket(f *testing.F) {
	f.Add([]byte{0x10, 14, 0, 4, 'M', 'Q', 'T', 'T', 4, 2, 0, 60, 0, 2, 'a', 'b'})
	f.Add([]byte{0x30, 5, 0, 1, 'a', '{', '}'})
	f.Add([]byte{0x82, 8, 0, 1, 0, 3, 'a', '/', '#', 0})
	f.Add([]byte{0x32, 0xff, 0xff, 0x03})
	f.Fuzz(func(t *testing.T, b []byte) {
		h, ok, err := parseHeader(b, PacketLimit)
		if err != nil || !ok || len(b)-h.size < h.length {
			return
		}
		body := b[h.size : h.size+h.length]
		switch h.kind() {
		case packets.Publish:
			p, err := parsePublish(h, body)
			if err == nil && len(p.topic)+len(p.payload) > len(body) {
				t.Fatal("more than there is")
			}
		case packets.Connect:
			_, _ = parseConnect(h, body)
		default:
			_, _ = decode(h, body)
		}
	})
}
