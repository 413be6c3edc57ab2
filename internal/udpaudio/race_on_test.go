//go:build race

package udpaudio

// raceDetector reports that sync.Pool drops items at random, so allocations are not counted.
const raceDetector = true
