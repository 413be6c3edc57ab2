package mqttdevice_test

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
	"log/slog"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	paho "github.com/eclipse/paho.mqtt.golang"
	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// device is a paho client with a UDP channel of its own: another
// implementation than the simulator's, and none of fleetd's.
type device struct {
	client paho.Client
	topic  string
	text   chan string
	audio  chan []byte
	done   chan struct{}
	once   sync.Once

	mu      sync.Mutex
	udp     *net.UDPConn
	block   cipher.Block
	nonce   [16]byte
	seq     uint32
	readers sync.WaitGroup
}

// login is what a device presents.
type login struct{ client, user, password string }

// packet is a CONNECT packet.
func (l login) packet(t testing.TB) []byte {
	t.Helper()
	p := packets.NewControlPacket(packets.Connect).(*packets.ConnectPacket)
	p.ProtocolName, p.ProtocolVersion, p.CleanSession, p.ClientIdentifier = "MQTT", 4, true, l.client
	p.UsernameFlag, p.Username, p.PasswordFlag, p.Password = true, l.user, true, []byte(l.password)
	var b bytes.Buffer
	if err := p.Write(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// connect logs a device in at a server or broker. subscribe asks for its topic
// down, as stock firmware never does.
func connect(address string, login login, id devices.ID, subscribe bool) (*device, error) {
	d := &device{topic: devices.TopicUp(id), text: make(chan string, 1000), audio: make(chan []byte, 1000), done: make(chan struct{})}
	options := paho.NewClientOptions().AddBroker(address).SetClientID(login.client).SetUsername(login.user).SetPassword(login.password).
		SetProtocolVersion(4).SetAutoReconnect(false).SetKeepAlive(30 * time.Second).SetConnectTimeout(5 * time.Second).
		SetDefaultPublishHandler(func(_ paho.Client, m paho.Message) {
			select {
			case d.text <- string(m.Payload()):
			case <-d.done:
			}
		}).SetConnectionLostHandler(func(paho.Client, error) { d.close() })
	d.client = paho.NewClient(options)
	if token := d.client.Connect(); !token.WaitTimeout(10*time.Second) || token.Error() != nil {
		return nil, errors.Join(errors.New("not connected"), token.Error())
	}
	if subscribe {
		if token := d.client.Subscribe(devices.TopicDown(id), 0, nil); !token.WaitTimeout(5*time.Second) || token.Error() != nil {
			return nil, errors.Join(errors.New("not subscribed"), token.Error())
		}
	}
	return d, nil
}

func (d *device) close() { d.once.Do(func() { close(d.done) }) }

func (d *device) Close() {
	d.client.Disconnect(0)
	d.close()
	d.mu.Lock()
	if d.udp != nil {
		_ = d.udp.Close()
	}
	d.mu.Unlock()
	d.readers.Wait()
}

func (d *device) Send(text string) error { return d.publish(d.topic, text) }

func (d *device) publish(topic, text string) error {
	token := d.client.Publish(topic, 0, false, text)
	if !token.WaitTimeout(5 * time.Second) {
		return errors.New("not published within 5 s")
	}
	return token.Error()
}

func (d *device) Receive() (string, error) {
	select {
	case text := <-d.text:
		return text, nil
	case <-d.done:
		return "", io.EOF
	}
}

func (d *device) ReceiveAudio() ([]byte, error) {
	select {
	case opus := <-d.audio:
		return opus, nil
	case <-d.done:
		return nil, io.EOF
	case <-time.After(5 * time.Second):
		return nil, errors.New("no audio within 5 s")
	}
}

// Hear opens the channel that the server's hello describes, as the firmware
// does (mqtt_protocol.cc:377-467): a new socket each time.
func (d *device) Hear(hello string) error {
	var h struct {
		UDP struct {
			Server     string
			Port       int
			Key, Nonce string
		}
	}
	if err := json.Unmarshal([]byte(hello), &h); err != nil {
		return err
	}
	key, keyErr := hex.DecodeString(h.UDP.Key)
	nonce, nonceErr := hex.DecodeString(h.UDP.Nonce)
	if err := errors.Join(keyErr, nonceErr); err != nil || len(nonce) != 16 {
		return fmt.Errorf("key or nonce: %w", err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return err
	}
	conn, err := net.Dial("udp4", net.JoinHostPort(h.UDP.Server, strconv.Itoa(h.UDP.Port)))
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.udp != nil {
		_ = d.udp.Close()
	}
	d.udp, d.block, d.seq = conn.(*net.UDPConn), block, 0
	copy(d.nonce[:], nonce)
	d.readers.Go(func() { d.listen(conn, block) })
	return nil
}

func (d *device) listen(conn net.Conn, block cipher.Block) {
	buf := make([]byte, 1500)
	last := uint32(0)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return
		}
		seq := binary.BigEndian.Uint32(buf[12:])
		if n <= 16 || buf[0] != 1 || int(binary.BigEndian.Uint16(buf[2:])) != n-16 || seq <= last {
			continue
		}
		last = seq
		opus := make([]byte, n-16)
		cipher.NewCTR(block, buf[:16]).XORKeyStream(opus, buf[16:n])
		select {
		case d.audio <- opus:
		case <-d.done:
			return
		}
	}
}

func (d *device) SendAudio(opus []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.udp == nil {
		return errors.New("no hello was heard")
	}
	d.seq++
	packet := append([]byte(nil), d.nonce[:]...)
	binary.BigEndian.PutUint16(packet[2:], uint16(len(opus)))
	binary.BigEndian.PutUint32(packet[8:], 0)
	binary.BigEndian.PutUint32(packet[12:], d.seq)
	packet = append(packet, opus...)
	cipher.NewCTR(d.block, packet[:16]).XORKeyStream(packet[16:], packet[16:])
	_, err := d.udp.Write(packet)
	return err
}

var _ devicetest.Device = (*device)(nil)

const hello = `{"type":"hello","version":3,"transport":"udp","features":{"mcp":true},"audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}}`

// lines is a log that tests can read.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }
