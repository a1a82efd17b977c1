"""From a prompt to text: chat templates, sampling options, streamed decoding, timings."""
