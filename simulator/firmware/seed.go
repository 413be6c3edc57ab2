package firmware

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"time"
)

// derive is the source of everything that differs between devices and runs: SHA-256 over seed, device and purpose.
func derive(seed uint64, who, what string) [32]byte {
	return sha256.Sum256([]byte(strconv.FormatUint(seed, 10) + "|" + who + "|" + what))
}

// derivedRand is a random stream that is the same for the same seed, device and purpose.
func derivedRand(seed uint64, who, what string) *rand.Rand {
	sum := derive(seed, who, what)
	return rand.New(rand.NewPCG(binary.BigEndian.Uint64(sum[:8]), binary.BigEndian.Uint64(sum[8:16])))
}

// uuid4 is the Client-Id: the firmware makes it once and keeps it in NVS (main/boards/common/board.cc:15-46).
func uuid4(sum [32]byte) string {
	sum[6] = sum[6]&0x0f | 0x40
	sum[8] = sum[8]&0x3f | 0x80
	h := hex.EncodeToString(sum[:16])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// serialNumber is 32 characters, as in the eFuse user data of a chip that has one.
func serialNumber(sum [32]byte) string {
	return "SN" + strings.ToUpper(hex.EncodeToString(sum[:15]))
}

// parseMAC reads the base address of a fleet as a number.
func parseMAC(s string) (uint64, error) {
	hw, err := net.ParseMAC(s)
	if err != nil || len(hw) != 6 {
		return 0, fmt.Errorf("%q is not a MAC address like 02:f1:ee:00:00:00", s)
	}
	return binary.BigEndian.Uint64(append([]byte{0, 0}, hw...)), nil
}

func formatMAC(n uint64) string {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], n)
	return net.HardwareAddr(b[2:]).String()
}

// jitter spreads d evenly over 0.75 d to 1.25 d.
func jitter(r *rand.Rand, d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return d*3/4 + time.Duration(r.Int64N(int64(d)/2+1))
}
