package mqttdevice

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"slices"
	"testing"

	"github.com/eclipse/paho.mqtt.golang/packets"
)

// clientFlags are the packets that a client may send, with their valid flags, from table
// 2.2. SUBSCRIBE and UNSUBSCRIBE of some 3.1 clients have 0, and a repeated one has DUP.
var clientFlags = map[byte][]byte{
	packets.Connect: {0}, packets.Publish: {0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13}, packets.Puback: {0}, packets.Subscribe: {0, 2, 10},
	packets.Unsubscribe: {0, 2, 10}, packets.Pingreq: {0}, packets.Disconnect: {0},
}

// readPaho is paho's ReadPacket for complete packets: for others it would allocate the
// announced length before it reads.
func readPaho(b []byte) (packets.ControlPacket, error) {
	length := 0
	for i := 1; i < len(b) && i <= 4; i++ {
		length |= int(b[i]&0x7f) << (7 * (i - 1))
		if b[i]&0x80 == 0 {
			break
		}
	}
	if length > len(b) {
		return nil, io.ErrUnexpectedEOF
	}
	return packets.ReadPacket(bytes.NewReader(b))
}

// bodyAgain returns the body of p as paho writes it. paho does not write the reserved bit
// of CONNECT, so it is set here.
func bodyAgain(t *testing.T, p packets.ControlPacket) []byte {
	var out bytes.Buffer
	if err := p.Write(&out); err != nil {
		t.Fatal(err)
	}
	b := out.Bytes()
	i := 1
	for b[i]&0x80 != 0 {
		i++
	}
	b = b[i+1:]
	if c, ok := p.(*packets.ConnectPacket); ok {
		b[3+len(c.ProtocolName)] |= c.ReservedBit
	}
	return b
}

// FuzzPacket compares this parser with paho's. Intended differences, which are refused
// here and accepted by paho:
//
//   - a length of more than four bytes, packets over the limit, packets that
//     only servers send, flags that a packet must not have;
//   - fields that are cut off, which paho fills up with zeros, and bytes after
//     the last field;
//   - PUBLISH with packet id 0 (section 2.3.1).
//
// One difference in the other direction: of a CONNECT of another protocol, such as MQTT 5,
// only the name and level are read here, while paho may fail to read the rest.
func FuzzPacket(f *testing.F) {
	f.Add([]byte{0x10, 14, 0, 4, 'M', 'Q', 'T', 'T', 4, 2, 0, 60, 0, 2, 'a', 'b'})
	f.Add([]byte("\x10\x21\x00\x06MQIsdp\x03\xee\x00\x3c\x00\x01a\x00\x01t\x00\x03bye\x00\x04user\x00\x02pw"))
	f.Add([]byte("\x10\x12\x00\x04MQTT\x04\xc2\x00\x3c\x00\x00\x00\x02me\x00\x00")) // client id and password are empty
	f.Add([]byte("\x10\x0e\x00\x04MQTT\x04\x02\x00\x3c\x00\x09ab"))                 // the client id is cut off
	f.Add([]byte("\x10\x10\x00\x04MQTT\x05\x02\x00\x3c\x05\x11\x00\x00\x00\x01"))
	f.Add([]byte{0x30, 5, 0, 1, 'a', '{', '}'})
	f.Add([]byte{0x3a, 6, 0, 1, 'a', 1, 2, 'x'})
	f.Add([]byte{0x32, 5, 0, 1, 'a', 0, 0})
	f.Add([]byte{0x30, 0x83, 0, 0, 1, 'a'}) // a length of two bytes that needs one
	f.Add([]byte{0x82, 8, 0, 1, 0, 3, 'a', '/', '#', 0})
	f.Add([]byte{0xa2, 7, 0, 1, 0, 3, 'a', '/', 'b'})
	f.Add([]byte{0xa2, 5, 0, 1, 0, 9, 'a'}) // the topic is cut off
	f.Add([]byte{0x40, 2, 0, 1})
	f.Add([]byte{0x40, 1, 7})
	f.Add([]byte{0xc0, 0, 0xe0, 0})
	f.Add([]byte{0x32, 0xff, 0xff, 0x03})
	f.Add([]byte{0x20, 2, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		want, theirErr := readPaho(b)
		h, ok, err := parseHeader(b, PacketLimit)
		allowed := len(b) > 0 && slices.Contains(clientFlags[b[0]>>4], b[0]&0x0f)
		switch {
		case errors.Is(err, errLength):
			if len(b) < 5 || b[1]&b[2]&b[3]&b[4]&0x80 == 0 {
				t.Errorf("%x does not have a length of five bytes", b)
			}
			return
		case errors.Is(err, errTooLarge):
			if theirErr == nil && len(b) <= PacketLimit {
				t.Errorf("%x is refused: %v", b, err)
			}
			return
		case err != nil:
			if allowed {
				t.Errorf("%x is refused: %v", b, err)
			}
			return
		case len(b) > 0 && !allowed:
			t.Fatalf("%x: the header is accepted", b)
		case !ok || len(b)-h.size < h.length:
			if theirErr == nil {
				t.Errorf("%x is incomplete here, paho returns %v", b, want)
			}
			return
		}
		body := b[h.size : h.size+h.length]
		whole := theirErr == nil && bytes.Equal(bodyAgain(t, want), body)
		switch h.kind() {
		case packets.Publish:
			comparePublish(t, h, body, want, theirErr)
		case packets.Connect:
			p, err := parseConnect(h, body)
			if _, _, protocolErr := protocolOf(body); err == nil && !isSupported(p.ProtocolName, p.ProtocolVersion) {
				name := append([]byte{0, byte(len(p.ProtocolName))}, p.ProtocolName...)
				if !bytes.HasPrefix(body, append(name, p.ProtocolVersion)) {
					t.Errorf("%x: %q %d", body, p.ProtocolName, p.ProtocolVersion)
				}
			} else if (err == nil) != (whole && protocolErr == nil) || err == nil && !reflect.DeepEqual(p, want) {
				t.Errorf("%x: %+v, %v, paho reads %+v, %v", body, p, err, want, theirErr)
			}
		default:
			p, err := decode(h, body)
			if (err == nil) != whole || err == nil && !reflect.DeepEqual(p, want) {
				t.Errorf("%x: %+v, %v, paho reads %+v, %v", b, p, err, want, theirErr)
			}
		}
	})
}

// comparePublish also encodes the message again and reads it with paho.
func comparePublish(t *testing.T, h header, body []byte, want packets.ControlPacket, theirErr error) {
	ours, err := parsePublish(h, body)
	if theirErr != nil {
		if err == nil {
			t.Errorf("%x: %+v, paho refuses: %v", body, ours, theirErr)
		}
		return
	}
	p := want.(*packets.PublishPacket)
	if zeroID := p.Qos > 0 && p.MessageID == 0; (err != nil) != zeroID {
		t.Fatalf("%x: %v, paho reads %v", body, err, p)
	}
	if err != nil {
		return
	}
	if string(ours.topic) != p.TopicName || !bytes.Equal(ours.payload, p.Payload) || ours.qos != p.Qos || ours.dup != p.Dup || ours.id != p.MessageID {
		t.Errorf("%x: %+v, paho reads %v", body, ours, p)
	}
	again, err := packets.ReadPacket(bytes.NewReader(appendPublish(nil, ours.topic, ours.payload)))
	if err != nil {
		t.Fatal(err)
	}
	if sent := again.(*packets.PublishPacket); sent.TopicName != p.TopicName || !bytes.Equal(sent.Payload, p.Payload) || sent.Qos != 0 || sent.Dup || sent.Retain {
		t.Errorf("%x is written as %v", body, sent)
	}
}
