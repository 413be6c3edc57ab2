package main

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/simulator/firmware"
)

const (
	defaultAttack = 30 * time.Second
	// attackTick is how often a sender catches up with its rate.
	attackTick = 2 * time.Millisecond
	// attackBurst bounds what a sender that is late sends at once.
	attackBurst = 4096
)

// attackOptions is the part of the command line that belongs to --attack.
type attackOptions struct {
	kind   string
	target string
	ssrc   string
	rate   int
	ports  int

	forged [4]byte // ssrc as bytes
}

func (a *attackOptions) flags(fs *flag.FlagSet) {
	fs.StringVar(&a.kind, "attack", "", "be no device but an attacker: `kind` udp or mqtt; ends after --duration, at most 30s if that is not given")
	fs.StringVar(&a.target, "target", "", "with --attack: `host:port` to attack; mqtt: empty takes the endpoint of the OTA answer")
	fs.StringVar(&a.ssrc, "ssrc", "", "with --attack udp: `hex` of the session to forge, 8 digits as in the report's udp_ssrc")
	fs.IntVar(&a.rate, "rate", 50_000, "with --attack udp: packets per second, `number`")
	fs.IntVar(&a.ports, "attack-ports", 4, "with --attack udp: source ports, `number`")
}

func (a *attackOptions) resolve() error {
	switch a.kind {
	case "", "mqtt":
		return nil
	case "udp":
	default:
		return fmt.Errorf("--attack: %q is unknown; known are udp and mqtt", a.kind)
	}
	ssrc, err := hex.DecodeString(a.ssrc)
	switch {
	case a.target == "":
		return errors.New("--attack udp needs --target host:port")
	case err != nil || len(ssrc) != len(a.forged):
		return fmt.Errorf("--ssrc: %q is not 8 hex digits; a device's report and --log debug show them", a.ssrc)
	case a.rate < 1 || a.ports < 1 || a.ports > 1000:
		return errors.New("--rate: at least 1; --attack-ports: 1 to 1000")
	}
	copy(a.forged[:], ssrc)
	return nil
}

// udpAttack is the report of --attack udp.
type udpAttack struct {
	Attack      string  `json:"attack"`
	Target      string  `json:"target"`
	SSRC        string  `json:"ssrc"`
	Ports       int     `json:"ports"`
	Seconds     float64 `json:"seconds"`
	Sent        uint64  `json:"packets_sent"`
	Bytes       uint64  `json:"bytes_sent"`
	SendErrors  uint64  `json:"send_errors"`
	PacketsBack uint64  `json:"packets_back"`
	BytesBack   uint64  `json:"bytes_back"`
}

// runAttack is the whole program with --attack.
func runAttack(ctx context.Context, o *options, stdout io.Writer) error {
	duration := o.duration
	if duration <= 0 {
		duration = defaultAttack
	}
	var result any
	var text string
	if o.attack.kind == "udp" {
		r, err := attackUDP(ctx, o, duration)
		if err != nil {
			return err
		}
		result, text = r, fmt.Sprintf("%d forged packets (%d bytes, %d not sent) in %.1f s, %.0f/s; %d packets (%d bytes) came back\n",
			r.Sent, r.Bytes, r.SendErrors, r.Seconds, float64(r.Sent)/r.Seconds, r.PacketsBack, r.BytesBack)
	} else {
		r, err := attackMQTT(ctx, o, duration)
		if err != nil {
			return err
		}
		result, text = r, r.text()
	}
	if !o.reportJSON {
		_, err := io.WriteString(stdout, text)
		return err
	}
	return json.NewEncoder(stdout).Encode(result)
}

// attackUDP floods the target with forged audio packets of one session and listens for answers, of which there must be
// none.
func attackUDP(ctx context.Context, o *options, duration time.Duration) (*udpAttack, error) {
	a := &o.attack
	ctx, cancel := context.WithTimeout(ctx, duration)
	defer cancel()
	r := &udpAttack{Attack: "udp", Target: a.target, SSRC: a.ssrc, Ports: a.ports}
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}()
	for range a.ports {
		c, err := net.Dial("udp4", a.target)
		if err != nil {
			return nil, fmt.Errorf("--target: %w", err)
		}
		conns = append(conns, c)
	}
	var sent, bytes, faults, back, bytesBack atomic.Uint64
	var senders, readers sync.WaitGroup
	started := time.Now()
	for i, c := range conns {
		senders.Go(func() {
			random := rand.New(rand.NewPCG(o.Seed, uint64(i)))
			packet := make([]byte, firmware.AudioHeader+maxForged)
			perSecond := float64(a.rate) / float64(a.ports)
			tick := time.NewTicker(attackTick)
			defer tick.Stop()
			for done := uint64(0); ; {
				due := min(uint64(time.Since(started).Seconds()*perSecond), done+attackBurst)
				for ; done < due && ctx.Err() == nil; done++ {
					n, err := c.Write(forge(packet, a.forged, random, uint32(done)))
					if err != nil {
						// A closed port answers with ICMP; the attacker goes on.
						faults.Add(1)
						continue
					}
					sent.Add(1)
					bytes.Add(uint64(n))
				}
				select {
				case <-tick.C:
				case <-ctx.Done():
					return
				}
			}
		})
		readers.Go(func() {
			buf := make([]byte, 1500)
			for {
				n, err := c.Read(buf)
				switch {
				case errors.Is(err, net.ErrClosed):
					return
				case err != nil:
					continue
				}
				back.Add(1)
				bytesBack.Add(uint64(n))
			}
		})
	}
	senders.Wait()
	r.Seconds = time.Since(started).Seconds()
	for _, c := range conns {
		_ = c.Close()
	}
	readers.Wait()
	r.Sent, r.Bytes, r.SendErrors, r.PacketsBack, r.BytesBack = sent.Load(), bytes.Load(), faults.Load(), back.Load(), bytesBack.Load()
	return r, nil
}

const (
	leastForged = 40
	maxForged   = 150
)

// forge writes one packet into room: a sound header, a payload encrypted with no key the server has, and a sequence
// that is random, the largest there is or the next in line.
func forge(room []byte, ssrc [4]byte, r *rand.Rand, n uint32) []byte {
	size := leastForged + r.IntN(maxForged-leastForged+1)
	p := room[:firmware.AudioHeader+size]
	p[0], p[1] = 1, 0
	binary.BigEndian.PutUint16(p[2:], uint16(size))
	copy(p[4:], ssrc[:])
	binary.BigEndian.PutUint32(p[8:], 0)
	sequence := n + 1
	switch n % 3 {
	case 0:
		sequence = r.Uint32()
	case 1:
		sequence = 1<<32 - 1
	}
	binary.BigEndian.PutUint32(p[12:], sequence)
	for i := firmware.AudioHeader; i < len(p); i += 8 {
		var word [8]byte
		binary.BigEndian.PutUint64(word[:], r.Uint64())
		copy(p[i:], word[:])
	}
	return p
}
