package fleettest

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	paho "github.com/eclipse/paho.mqtt.golang"

	"fleetd/internal/devicetest"
)

// otaReply is the OTA reply as a device reads it.
type otaReply struct {
	Firmware *struct {
		Version string
		URL     string
		Force   json.RawMessage
	}
	Activation *struct{ Code, Message, Challenge string }
	MQTT       *struct {
		Endpoint, Username, Password string
		ClientID                     string `json:"client_id"`
		PublishTopic                 string `json:"publish_topic"`
		SubscribeTopic               string `json:"subscribe_topic"`
		Keepalive                    int
	}
	WebSocket *struct {
		URL, Token string
		Version    int
	}
	raw string
}

// checkIn asks the OTA address as a device does at its boot.
func checkIn(t testing.TB, ota, id, body string) (reply otaReply, status int) {
	t.Helper()
	for again := 0; ; again++ {
		reply, status = checkInOnce(t, ota, id, body)
		if status != http.StatusServiceUnavailable || again == 5 { // it may have joined too late on a busy machine
			return reply, status
		}
		time.Sleep(300 * time.Millisecond)
	}
}

func checkInOnce(t testing.TB, ota, id, body string) (reply otaReply, status int) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ota, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header = http.Header{"Device-Id": {id}, "Client-Id": {clientOf(id)}, "User-Agent": {"bread-compact-wifi/2.4.2"}, "Content-Type": {"application/json"}}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	if response.StatusCode == http.StatusOK {
		if err := json.Unmarshal(text, &reply); err != nil {
			t.Fatalf("OTA reply %s: %v", text, err)
		}
	}
	reply.raw = string(text)
	return reply, response.StatusCode
}

// clientOf is the Client-Id of a device of the tests.
func clientOf(id string) string { return "client-of-" + strings.ReplaceAll(id, ":", "") }

// login is what a device presents to an MQTT server, and where it speaks.
type login struct{ address, client, user, password, topic string }

// boot asks the OTA address and returns what the device logs in with.
func boot(t testing.TB, ota, id string) login {
	t.Helper()
	reply, status := checkIn(t, ota, id, "{}")
	if status != http.StatusOK || reply.MQTT == nil {
		t.Fatalf("OTA check: %d %s", status, reply.raw)
	}
	m := reply.MQTT
	return login{m.Endpoint, m.ClientID, m.Username, m.Password, m.PublishTopic}
}

// device is a paho client that answers MCP by its script: another
// implementation than the simulator's, which tests can make do anything.
type device struct {
	*devicetest.Script
	client paho.Client
	topic  string
	hellos chan string
	gone   chan struct{} // the connection ended
	once   sync.Once

	mu    sync.Mutex
	texts []string // other messages received
}

const deviceHello = `{"type":"hello","version":3,"transport":"udp","features":{"mcp":true},"audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}}`

// dial logs in; the connection ends with the test.
func (l login) dial(t testing.TB, script *devicetest.Script) *device {
	t.Helper()
	d, err := l.connect(script)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.close)
	return d
}

func (l login) connect(script *devicetest.Script) (*device, error) {
	d := &device{Script: script, topic: l.topic, hellos: make(chan string, 10), gone: make(chan struct{})}
	inbox := make(chan string, 1000)
	options := paho.NewClientOptions().AddBroker("tcp://" + l.address).SetClientID(l.client).SetUsername(l.user).SetPassword(l.password).
		SetProtocolVersion(4).SetAutoReconnect(false).SetKeepAlive(30 * time.Second).SetConnectTimeout(10 * time.Second).
		SetDefaultPublishHandler(func(_ paho.Client, m paho.Message) {
			select {
			case inbox <- string(m.Payload()):
			case <-d.gone:
			}
		}).SetConnectionLostHandler(func(paho.Client, error) { d.ended() })
	d.client = paho.NewClient(options)
	if token := d.client.Connect(); !token.WaitTimeout(15*time.Second) || token.Error() != nil {
		return nil, errors.Join(errors.New("not connected"), token.Error())
	}
	go d.answer(inbox)
	return d, nil
}

// answer plays the device until its connection ends.
func (d *device) answer(inbox <-chan string) {
	for {
		select {
		case <-d.gone:
			return
		case text := <-inbox:
			switch {
			case strings.Contains(text, `"type":"hello"`):
				d.hellos <- text
			case strings.Contains(text, `"type":"mcp"`):
				if answer := d.Answer([]byte(text)); answer != "" {
					_ = d.send(answer) // the connection ends if it fails
				}
			default:
				d.mu.Lock()
				d.texts = append(d.texts, text)
				d.mu.Unlock()
			}
		}
	}
}

func (d *device) ended() { d.once.Do(func() { close(d.gone) }) }

func (d *device) close() {
	d.client.Disconnect(0)
	d.ended()
}

func (d *device) send(text string) error {
	token := d.client.Publish(d.topic, 0, false, text)
	if !token.WaitTimeout(10 * time.Second) {
		return errors.New("not published within 10 s")
	}
	return token.Error()
}

// told returns the messages received besides MCP and hello.
func (d *device) told() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.texts)
}

// hello opens an audio channel as the firmware does (mqtt_protocol.cc:377-467):
// a new socket each time.
func (d *device) hello(t testing.TB) *channel {
	t.Helper()
	if err := d.send(deviceHello); err != nil {
		t.Fatal(err)
	}
	var text string
	select {
	case text = <-d.hellos:
	case <-time.After(10 * time.Second):
		t.Fatal("no server hello within 10 s")
	}
	var h struct {
		SessionID string `json:"session_id"`
		UDP       struct {
			Server     string
			Port       int
			Key, Nonce string
		}
	}
	if err := json.Unmarshal([]byte(text), &h); err != nil {
		t.Fatalf("server hello %s: %v", text, err)
	}
	c := &channel{session: h.SessionID, server: net.JoinHostPort(h.UDP.Server, strconv.Itoa(h.UDP.Port)), heard: make(chan []byte, 1000)}
	key, keyErr := hex.DecodeString(h.UDP.Key)
	nonce, nonceErr := hex.DecodeString(h.UDP.Nonce)
	if err := errors.Join(keyErr, nonceErr); err != nil || len(nonce) != len(c.nonce) || h.SessionID == "" {
		t.Fatalf("server hello %s: %v", text, err)
	}
	copy(c.nonce[:], nonce)
	var err error
	if c.block, err = aes.NewCipher(key); err != nil {
		t.Fatal(err)
	}
	c.conn = c.socket(t)
	go c.listen()
	return c
}

// channel is the audio of one conversation, made by hand.
type channel struct {
	session, server string
	block           cipher.Block
	nonce           [16]byte
	conn            net.Conn
	seq             uint32
	heard           chan []byte   // Opus packets of the server
	stray           atomic.Uint64 // datagrams that are none
}

// socket is another source address towards the server.
func (c *channel) socket(t testing.TB) net.Conn {
	t.Helper()
	conn, err := net.Dial("udp4", c.server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (c *channel) ssrc() string { return hex.EncodeToString(c.nonce[4:8]) }

func (c *channel) listen() {
	buf := make([]byte, 1500)
	last := uint32(0)
	for {
		n, err := c.conn.Read(buf)
		if err != nil {
			return
		}
		if n <= 16 || buf[0] != 1 || int(binary.BigEndian.Uint16(buf[2:])) != n-16 || binary.BigEndian.Uint32(buf[12:]) <= last {
			c.stray.Add(1)
			continue
		}
		last = binary.BigEndian.Uint32(buf[12:])
		opus := make([]byte, n-16)
		cipher.NewCTR(c.block, buf[:16]).XORKeyStream(opus, buf[16:n])
		c.heard <- opus
	}
}

// packet seals one packet.
func (c *channel) packet(seq uint32, opus []byte) []byte {
	p := bytes.Clone(c.nonce[:])
	binary.BigEndian.PutUint16(p[2:], uint16(len(opus)))
	binary.BigEndian.PutUint32(p[8:], 0)
	binary.BigEndian.PutUint32(p[12:], seq)
	p = append(p, opus...)
	cipher.NewCTR(c.block, p[:16]).XORKeyStream(p[16:], p[16:])
	return p
}

// say sends frame number n, which is its sequence, too.
func (c *channel) say(t testing.TB) {
	t.Helper()
	c.seq++
	if _, err := c.conn.Write(c.packet(c.seq, frame(c.seq))); err != nil {
		t.Fatal(err)
	}
}

const frameTime = 60 * time.Millisecond

// frame is an Opus packet of 60 ms unlike any other, of the size of speech:
// SILK wideband, mono (RFC 6716, configuration 11, code 0).
func frame(n uint32) []byte {
	return append(fmt.Appendf([]byte{11 << 3}, "frame %08d ", n), bytes.Repeat([]byte{byte(n)}, 70)...)
}

// numberOf is the reverse of frame.
func numberOf(opus []byte) (n uint32, ok bool) {
	_, err := fmt.Sscanf(string(opus[min(1, len(opus)):min(len(opus), 15)]), "frame %08d", &n)
	return n, err == nil && bytes.Equal(opus, frame(n))
}

// every calls f each interval, n times, by the clock: a busy machine does not
// stretch the stream.
func every(t testing.TB, interval time.Duration, n int, f func(i int)) {
	t.Helper()
	begun := time.Now()
	for i := range n {
		f(i)
		select {
		case <-time.After(time.Until(begun.Add(time.Duration(i+1) * interval))):
		case <-t.Context().Done():
			return
		}
	}
}
