//go:build !race

package udpaudio

const raceDetector = false
